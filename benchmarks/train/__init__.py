"""One runner of trainings: grids of trials, their results, tables and pictures."""
