"""Work beside a training that the training does not notice: imports of a warm interpreter."""
