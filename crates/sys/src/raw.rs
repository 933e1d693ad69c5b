//! System calls with nothing between: no errno, so that a child sharing its parent's memory writes none of its thread's.

#[cfg(target_arch = "x86_64")]
use core::arch::asm;
#[cfg(target_arch = "aarch64")]
use core::arch::asm;

/// The call's value, or minus errno.
///
/// # Safety
/// As the call itself: every pointer among the arguments must be valid for what the kernel does with it.
pub(crate) unsafe fn call(number: libc::c_long, args: [usize; 6]) -> isize {
    let value: isize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the kernel's calling convention; the caller vouches for the arguments.
    unsafe {
        asm!("syscall", inlateout("rax") number as isize => value,
            in("rdi") args[0], in("rsi") args[1], in("rdx") args[2], in("r10") args[3], in("r8") args[4], in("r9") args[5],
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the kernel's calling convention; the caller vouches for the arguments.
    unsafe {
        asm!("svc 0", in("x8") number as isize, inlateout("x0") args[0] as isize => value,
            in("x1") args[1], in("x2") args[2], in("x3") args[3], in("x4") args[4], in("x5") args[5],
            options(nostack));
    }
    value
}

/// `clone3` whose child runs `entry(argument)` on the stack that `args` names, and must never return.
///
/// # Safety
/// `args` is a valid `struct clone_args` with a stack of its own, aligned to 16 bytes; `entry` ends by exit or exec;
/// what `argument` points to outlives the child's use of it.
pub(crate) unsafe fn clone3(
    args: *const libc::clone_args,
    // SAFETY: part of this function's own contract, above.
    entry: unsafe extern "C" fn(usize) -> !,
    argument: usize,
) -> isize {
    let value: isize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the child starts on its own empty stack with the argument in a register and never comes back here.
    unsafe {
        asm!("syscall", "test rax, rax", "jnz 2f", "xor ebp, ebp", "mov rdi, r13", "call r12", "ud2", "2:",
            inlateout("rax") libc::SYS_clone3 as isize => value,
            in("rdi") args, in("rsi") size_of::<libc::clone_args>(), in("r12") entry, in("r13") argument,
            lateout("rcx") _, lateout("r11") _);
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the child starts on its own empty stack with the argument in a register and never comes back here.
    unsafe {
        asm!("svc 0", "cbnz x0, 2f", "mov x29, xzr", "mov x0, x20", "blr x21", "brk 1", "2:",
            in("x8") libc::SYS_clone3 as isize, inlateout("x0") args as isize => value,
            in("x1") size_of::<libc::clone_args>(), in("x20") argument, in("x21") entry);
    }
    value
}
