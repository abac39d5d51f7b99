"""What is measured for each topic: a module and a function each, that know no language."""
