"""What the compilers of an H100 and of a TPU v5e allocate for every step, without the devices."""
