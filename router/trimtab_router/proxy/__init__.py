"""HTTP proxy: requests in, replica connections out, bytes passed through."""
