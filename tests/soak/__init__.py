"""Hours of what a host does to a process: threads, forks, signals, kills, full disks, little memory, dying ranks."""
