//! Gives the library the name under which programs look for the driver.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // What it hands out are its own functions, as with NVIDIA's, whoever interposes them.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
