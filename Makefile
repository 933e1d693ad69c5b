# The thin face of ./dev, which is the only tool.
all:
	@./dev build
setup build lint test test-quick test-all run bench fuzz clean:
	@./dev $@
.PHONY: all setup build lint test test-quick test-all run bench fuzz clean
