"""Hours of a host's effects on a process: threads, forks, signals, kills, full disks, little memory, dying ranks."""
