"""Queue orders beside each other, in the simulator and on servers."""
