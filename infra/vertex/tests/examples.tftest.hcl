# The example plans as it stands.

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
