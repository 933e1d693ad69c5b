"""Import, build, verify and mount layers."""
