"""What the cluster says of a resource's replica groups and pods, as values."""
