"""Who generates the compute kernels of a graph whose order is decided: `inner="inductor"`."""
