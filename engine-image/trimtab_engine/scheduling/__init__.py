"""The next batch from waiting, running and free blocks: pure, without tensors, sockets or a clock."""
