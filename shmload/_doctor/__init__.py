"""The doctor: what hinders loads on this machine, with a remedy for each finding.

Guarantee: it changes nothing. May import `_loading` and below.
"""
