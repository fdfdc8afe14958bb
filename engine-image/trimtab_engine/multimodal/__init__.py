"""Images and videos of a prompt. `items` defines the values shared by the layers above and below."""
