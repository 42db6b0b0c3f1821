"""Problems: costs, sides, references and every check of an argument."""
