"""The commands, one file a group. `add(commands)` declares them; what they do lives in `deploy`."""
