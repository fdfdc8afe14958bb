"""Commands of the Makefile and of CI: set-up, timed stages, leftovers. Run `python3 hack/dev --help`."""
