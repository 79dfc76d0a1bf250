"""Resources of the machine and the process: CPUs, memory, GPUs, clock, logs and tuning."""
