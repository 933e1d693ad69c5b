"""What a DSec platform must do, as tests of its public surface. Each is written once and runs over the SDK and over plain
HTTP, on every backend named. docs/conformance.md says how to run it and which test stands for which row.

    pytest --pyargs dsec.testing.suite --dsec-url URL --dsec-key KEY --dsec-backend container
"""
