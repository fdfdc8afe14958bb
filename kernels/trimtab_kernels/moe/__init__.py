"""The steps of fused_moe on CUDA: routing, alignment, grouped_gemm (twice), combination."""
