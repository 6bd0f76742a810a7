"""What compare_memory.py is made of: workloads and methods, their interleaved times, the page."""
