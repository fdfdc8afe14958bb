"""How kernels are compiled and launched, and what they ask about the device: no kernel is in here."""
