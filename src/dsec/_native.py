"""The native module's exports, so that import rules can see them; made by crates/native as dsec._core."""
