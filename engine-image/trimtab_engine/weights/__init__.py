"""Where weights come from: a `WeightSource` per format, all giving tensors by the transformers names.

safetensors and GGUF only: formats that can run code when they are read (.bin, .pt, .pth) are refused by name.
"""
