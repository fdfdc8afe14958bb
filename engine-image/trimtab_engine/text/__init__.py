"""From text to tokens and from tokens to text: tokenizers, chat templates, stop strings."""
