"""`python -m dsec` is `dsec`."""

from dsec.cli import main

main()
