"""How soon a lost node is seen, and how often a healthy one is taken for lost."""
