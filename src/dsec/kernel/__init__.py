"""Linux, one thin module a facility; the sole user of the native module."""
