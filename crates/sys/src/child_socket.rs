//! Descriptors over Unix sockets.

use std::os::fd::AsRawFd;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use crate::error::{Error, Result};

const SPACE: usize = 24; // CMSG_SPACE of one descriptor

#[repr(align(8))]
struct Control([u8; SPACE]);

/// Sends one byte with a descriptor; allocates nothing, for use between clone and exec.
pub(crate) fn send_descriptor(socket: RawFd, descriptor: RawFd) -> std::result::Result<(), i32> {
    let mut byte = [0u8; 1];
    let mut control = Control([0; SPACE]);
    let mut part = libc::iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: 1,
    };
    // SAFETY: the message points to buffers that live past the call; the control buffer holds exactly one descriptor.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = ptr::from_mut(&mut part);
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = SPACE;
        let head = libc::CMSG_FIRSTHDR(&message);
        (*head).cmsg_level = libc::SOL_SOCKET;
        (*head).cmsg_type = libc::SCM_RIGHTS;
        (*head).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize;
        ptr::write_unaligned(libc::CMSG_DATA(head).cast::<RawFd>(), descriptor);
        if libc::sendmsg(socket, &message, libc::MSG_NOSIGNAL) < 0 {
            return Err(*libc::__errno_location());
        }
    }
    Ok(())
}

/// Takes the descriptor that a message brings, without waiting.
///
/// # Errors
/// EAGAIN when no message is there, EPIPE when the sender is gone, EBADMSG for a message without a descriptor.
pub fn receive_descriptor(socket: BorrowedFd<'_>) -> Result<OwnedFd> {
    let mut byte = [0u8; 1];
    let mut control = Control([0; SPACE]);
    let mut part = libc::iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: 1,
    };
    // SAFETY: as above; a received descriptor is new and owned by nobody else.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = ptr::from_mut(&mut part);
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = SPACE;
        let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
        let size = libc::recvmsg(socket.as_raw_fd(), &mut message, flags);
        if size < 0 {
            return Err(Error::last("recvmsg", "descriptor"));
        }
        let head = libc::CMSG_FIRSTHDR(&message);
        if size == 0 {
            return Err(Error::new("recvmsg", "descriptor", libc::EPIPE));
        }
        if head.is_null() || (*head).cmsg_type != libc::SCM_RIGHTS {
            return Err(Error::new("recvmsg", "descriptor", libc::EBADMSG));
        }
        Ok(OwnedFd::from_raw_fd(ptr::read_unaligned(
            libc::CMSG_DATA(head).cast::<RawFd>(),
        )))
    }
}
