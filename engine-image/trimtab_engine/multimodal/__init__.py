"""Images and videos on their way into a prompt. `items` has the values that everybody below and above agrees on."""
