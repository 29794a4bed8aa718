//! The protocol of krex.
