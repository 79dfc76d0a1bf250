# The examples plan as they stand.

mock_provider "azurerm" {}
mock_provider "azapi" {}

variables {
  gpu_image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000"
  image_uri     = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000"
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
