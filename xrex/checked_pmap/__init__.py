"""`xrex.pmap`: its checks, its programs, and what processes agree on."""
