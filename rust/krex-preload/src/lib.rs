//! The interposer: a library that `krex run` loads into every process of a tenant (`LD_PRELOAD`),
//! and that gates what the process submits to the CUDA driver.
//!
//! * `wrappers`: one function per entry of the driver's table that matters, generated from it;
//! * `lookup` and `resolver`: how programs come by the wrappers instead of the driver's own
//!   functions: by name, by `dlsym`, by `cuGetProcAddress`;
//! * `calls`: what a wrapper does around the driver's function;
//! * `thread`: what is known of the calling thread; `lane`: of this process on one device;
//! * `streams` and `captures`: what may still run, and what is only recorded;
//! * `helper`: the thread that drains;
//! * `unwind`: what lets a thread be cancelled inside of a wrapper.
//!
//! Nothing happens when the library is loaded: it has no constructors. Whatever goes wrong in it,
//! the program goes on as without it.

mod calls;
mod captures;
mod driver;
mod helper;
mod host;
mod lane;
mod lookup;
mod resolver;
mod streams;
mod thread;
mod unwind;
mod wrappers;
