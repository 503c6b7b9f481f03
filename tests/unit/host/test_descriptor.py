"""A descriptor has one owner, which closes it once."""

import os

from shmload._host.descriptors import Descriptor


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_second_close_spares_a_file_that_got_the_number():
    owner = Descriptor(os.memfd_create("first"))
    number = owner.fd
    owner.close()
    other = os.memfd_create("second")
    assert other == number, "the kernel gives the lowest free number"
    owner.close()
    assert is_open(other)
    os.close(other)


def test_context_closes():
    with Descriptor(os.memfd_create("file")) as owner:
        number = owner.fd
    assert not is_open(number)
    assert owner.fd == -1
