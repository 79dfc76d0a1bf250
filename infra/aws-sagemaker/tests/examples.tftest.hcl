# The examples plan as they stand.

mock_provider "aws" {}

variables {
  image_uri = "111122223333.dkr.ecr.eu-west-1.amazonaws.com/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000"
}

run "realtime" {
  command = plan
  module {
    source = "./examples/realtime"
  }
}

run "async" {
  command = plan
  module {
    source = "./examples/async"
  }
}

run "serverless" {
  command = plan
  module {
    source = "./examples/serverless"
  }
}

run "scale_to_zero" {
  command = plan
  module {
    source = "./examples/scale-to-zero"
  }
}

run "complete" {
  command = plan
  module {
    source = "./examples/complete"
  }
}

run "multi_model" {
  command = plan
  module {
    source = "./examples/multi-model"
  }
}
