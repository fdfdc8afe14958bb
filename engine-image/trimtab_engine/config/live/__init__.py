"""The fields that change while requests are served: their table, how a value is read, and how a patch is checked."""
