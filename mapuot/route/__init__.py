"""Routes: decide how a call is solved."""
