# What the module refuses, each by its own message.

mock_provider "aws" {}

variables {
  name      = "remora"
  model_uri = "s3://example-models/repository/"
  image_uri = "111122223333.dkr.ecr.eu-west-1.amazonaws.com/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000"
}

run "a_name_that_sagemaker_refuses" {
  command = plan
  variables {
    name = "remora_endpoint"
  }
  expect_failures = [var.name]
}

run "models_outside_s3" {
  command = plan
  variables {
    model_uri = "gs://bucket/models/"
  }
  expect_failures = [var.model_uri]
}

run "a_prefix_that_takes_its_neighbours" {
  command = plan
  variables {
    model_uri = "s3://example-models/repository"
  }
  expect_failures = [var.model_uri]
}

run "an_image_by_tag" {
  command = plan
  variables {
    image_uri = "111122223333.dkr.ecr.eu-west-1.amazonaws.com/remora:latest"
  }
  expect_failures = [var.image_uri]
}

run "an_unknown_mode" {
  command = plan
  variables {
    mode = "batch"
  }
  expect_failures = [var.mode]
}

run "a_real_time_endpoint_without_instances" {
  command = plan
  variables {
    capacity = { min = 0, max = 2 }
  }
  expect_failures = [var.capacity]
}

run "fewer_at_most_than_at_least" {
  command = plan
  variables {
    capacity = { min = 3, max = 2 }
  }
  expect_failures = [var.capacity]
}

run "async_without_a_place_for_answers" {
  command = plan
  variables {
    mode = "async"
  }
  expect_failures = [var.async]
}

run "serverless_with_a_prefix" {
  command = plan
  variables {
    mode = "serverless"
  }
  expect_failures = [var.mode]
}

run "serverless_with_an_odd_memory" {
  command = plan
  variables {
    mode       = "serverless"
    model_uri  = "s3://example-models/models.tar.gz"
    serverless = { memory_mb = 4000, max_concurrency = 5 }
  }
  expect_failures = [var.serverless]
}

run "subnets_without_security_groups" {
  command = plan
  variables {
    subnet_ids = ["subnet-1"]
  }
  expect_failures = [var.security_group_ids]
}

run "a_start_that_takes_too_long" {
  command = plan
  variables {
    startup_timeout_seconds = { health_check = 7200, download = 900 }
  }
  expect_failures = [var.startup_timeout_seconds]
}

run "a_canary_of_more_than_half" {
  command = plan
  variables {
    rollout = { canary_percent = 80, watch_seconds = 60, keep_old_seconds = 60 }
  }
  expect_failures = [var.rollout]
}

run "gpus_below_an_image_without_cuda" {
  command = plan
  variables {
    instance_type = "ml.g5.xlarge"
  }
  expect_failures = [var.instance_type]
}

run "a_key_for_the_volume_of_a_gpu_instance" {
  command = plan
  variables {
    instance_type      = "ml.g5.xlarge"
    gpu_image          = true
    volume_kms_key_arn = "arn:aws:kms:eu-west-1:111122223333:key/volume"
  }
  expect_failures = [var.volume_kms_key_arn]
}

run "a_key_for_the_volume_of_an_instance_with_disks" {
  command = plan
  variables {
    instance_type      = "ml.m6id.large"
    volume_kms_key_arn = "arn:aws:kms:eu-west-1:111122223333:key/volume"
  }
  expect_failures = [var.volume_kms_key_arn]
}

run "a_canary_of_one_instance" {
  command = plan
  variables {
    rollout = { type = "CANARY" }
  }
  expect_failures = [var.rollout]
}

run "a_rollout_of_components" {
  command = plan
  variables {
    mode    = "scale-to-zero"
    rollout = { type = "ALL_AT_ONCE" }
  }
  expect_failures = [var.rollout]
}

run "a_bucket_without_models" {
  command = plan
  variables {
    create_bucket = true
  }
  expect_failures = [var.create_bucket]
}

run "models_out_of_an_empty_folder" {
  command = plan
  variables {
    models_path = "./tests/nothing"
  }
  expect_failures = [var.models_path]
}

run "an_earlier_release_by_tag" {
  command = plan
  variables {
    previous = [{ image_uri = "remora:latest", model_uri = "s3://example-models/repository/" }]
  }
  expect_failures = [var.previous]
}

run "more_to_begin_with_than_there_may_be" {
  command = plan
  variables {
    capacity = { min = 1, max = 2, initial = 3 }
  }
  expect_failures = [var.capacity]
}

run "async_without_a_place_for_requests" {
  command = plan
  variables {
    mode  = "async"
    async = { input_uri = "requests", output_uri = "s3://example-answers/remora" }
  }
  expect_failures = [var.async]
}

run "one_archive_for_many_models" {
  command = plan
  variables {
    mode      = "multi-model"
    model_uri = "s3://example-models/models.tar.gz"
  }
  expect_failures = [var.mode]
}

run "many_models_on_a_gpu" {
  command = plan
  variables {
    mode          = "multi-model"
    instance_type = "ml.g5.xlarge"
    gpu_image     = true
  }
  expect_failures = [var.instance_type]
}

run "components_without_a_place" {
  command = plan
  variables {
    components = { small = { model_uri = "s3://example-models/small/" } }
  }
  expect_failures = [var.components]
}

run "a_component_that_takes_its_neighbours" {
  command = plan
  variables {
    mode       = "scale-to-zero"
    components = { small = { model_uri = "s3://example-models/small" } }
  }
  expect_failures = [var.components]
}

run "a_component_with_more_copies_at_least_than_at_most" {
  command = plan
  variables {
    mode       = "scale-to-zero"
    components = { small = { model_uri = "s3://example-models/small/", copies = { min = 3, max = 2 } } }
  }
  expect_failures = [var.components]
}

run "a_schedule_for_what_has_no_instances" {
  command = plan
  variables {
    mode      = "serverless"
    model_uri = "s3://example-models/models.tar.gz"
    schedule  = { night = { at = "cron(0 19 * * ? *)", min = 1, max = 2 } }
  }
  expect_failures = [var.schedule]
}

run "a_time_that_is_no_expression" {
  command = plan
  variables {
    schedule = { night = { at = "19:00", min = 1, max = 2 } }
  }
  expect_failures = [var.schedule]
}
