"""The doctor: what of this machine is in the way of loads, with a remedy for each finding.

Guarantee: it changes nothing. May import `_service` and below.
"""
