# The examples plan as they stand.

mock_provider "google" {}

variables {
  image_uri = "registry.example/example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000"
}

run "simple" {
  command = plan
  module {
    source = "./examples/simple"
  }
}

run "complete" {
  command = plan
  module {
    source = "./examples/complete"
  }
}
