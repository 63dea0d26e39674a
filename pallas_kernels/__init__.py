"""Row kernels of xrex: one public module, `pallas_kernels.api`, over several implementations."""
