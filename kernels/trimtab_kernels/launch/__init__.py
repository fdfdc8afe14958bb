"""Compilation, launch configuration and device facts of the kernels. Contains no kernel."""
