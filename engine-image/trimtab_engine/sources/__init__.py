"""Models that are elsewhere, by name: a pinned version of their files, fetched into a cache that engines may share.

hf://, s3:// and oci:// differ in what lists the files and gives their bytes, a `Source` each (`hub`, `s3`, `registry`);
all else, from the lock to the last checksum, is the same code for all.
"""
