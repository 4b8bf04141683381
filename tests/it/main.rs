mod model;
mod prompt;
