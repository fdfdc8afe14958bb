"""The other ranks of a layout: their processes, what they are told, how they meet and how a lost one is noticed."""
