"""Remote models by name: a pinned version of their files, downloaded into a cache that engines can share.

Each of hf://, s3:// and oci:// has a `Source` (`hub`, `s3`, `registry`) that lists files and reads their bytes; locks,
transfers and checksums are shared code.
"""
