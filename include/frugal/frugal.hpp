#pragma once

/// All of frugal. A program that needs one policy includes that policy's header instead: each works alone.

#include <frugal/allocator.hpp>
#include <frugal/amp_options.hpp>
#include <frugal/amp_policy.hpp>
#include <frugal/averager.hpp>
#include <frugal/batch_size_prober.hpp>
#include <frugal/batches.hpp>
#include <frugal/calibration.hpp>
#include <frugal/capability.hpp>
#include <frugal/channels_last.hpp>
#include <frugal/checkpoint_manager.hpp>
#include <frugal/console.hpp>
#include <frugal/early_stopper.hpp>
#include <frugal/fused_step.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/grad_clip.hpp>
#include <frugal/loss_scaler.hpp>
#include <frugal/observers.hpp>
#include <frugal/policy.hpp>
#include <frugal/preemption.hpp>
#include <frugal/run.hpp>
#include <frugal/schedule.hpp>
#include <frugal/state_guard.hpp>
#include <frugal/trainer.hpp>
#include <frugal/update.hpp>
#include <frugal/version.hpp>
