"""Refusals of the kernel keep their operation, object and reason."""

import errno

import pytest

from dsec.kernel.errors import KernelError, from_kernel, kernel_op
from dsec.kernel.mounts import mount_erofs, umount


def test_a_native_refusal_is_named() -> None:
    with pytest.raises(KernelError) as caught:
        umount("/no/such/place")
    assert (caught.value.op, caught.value.path, caught.value.errno) == ("umount", "/no/such/place", errno.ENOENT)
    assert str(caught.value) == "umount /no/such/place: No such file or directory"


def test_an_operation_of_ours_is_named() -> None:
    with pytest.raises(KernelError) as caught, kernel_op("read", "thing"):
        raise OSError(errno.EIO, "x")
    assert (caught.value.op, caught.value.path, caught.value.errno) == ("read", "thing", errno.EIO)


def test_other_errors_pass() -> None:
    @from_kernel
    def wrong() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        wrong()


def test_a_path_that_an_option_cannot_carry_is_refused() -> None:
    with pytest.raises(KernelError) as caught:
        mount_erofs("/a", "/b,c", "/d")
    assert caught.value.errno == errno.EINVAL
