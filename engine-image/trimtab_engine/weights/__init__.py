"""Weight formats: a `WeightSource` per format, all with tensors under transformers' names.

safetensors and GGUF only: formats that can run code when they are read (.bin, .pt, .pth) are rejected.
"""
