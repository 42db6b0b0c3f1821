"""What a problem is: costs, sides, references and every check of an argument."""
