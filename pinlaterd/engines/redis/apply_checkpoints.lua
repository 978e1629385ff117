-- Checkpoints. Of each op: source, how many. Of each checkpoint: priority, id, run-after in ms,
-- body or none, '1' if it goes back to PENDING, attempts or none, text, claim or none.

-- The source in HOST:PORT:STARTMILLIS:SOURCE:COUNTER; nil if it is not of that form.
local function claim_source(claim)
  return string.match(claim, '^[^:]*:[^:]*:[^:]*:(.*):[^:]*$')
end

local checkpoints = each_op(function(queue)
  local source, result = take(), { 0, 0 }
  for _ = 1, take_number() do
    local priority, id, run_after, body = take(), take(), take_number(), take_optional()
    local to_pending, attempts = take() == '1', take_optional()
    local text, claim = take(), take_optional()
    local job = held_by(queue, priority, id, claim)
    if not job or (claim == nil and claim_source(job.claim) ~= source) then
      result[2] = result[2] + 1
    else
      result[1] = result[1] + 1
      local changes = { ra = run_after, ua = now, bd = body, al = attempts, ar = attempts }
      if text ~= '' then
        changes.cs = cut(text .. job.status, status_chars)
      end
      change_job(queue, id, changes, to_pending)
      if to_pending then
        redis.call('ZREM', job.running, id)
        redis.call('ZADD', set_key(queue, priority, PENDING), score_of(run_after, id), id)
        requeue(result, priority, id, run_after)
      else
        redis.call('ZADD', job.running, score_of(now, id), id)
      end
    end
  end
  return result
end)

-- Releases. Of each op: how many. Of each release: priority, id, claim.

local releases = each_op(function(queue)
  local result = {}
  for _ = 1, take_number() do
    local priority, id, claim = take(), take(), take()
    local job = held_by(queue, priority, id, claim)
    if job then
      release_job(queue, id)
      redis.call('ZREM', job.running, id)
      redis.call('ZADD', set_key(queue, priority, PENDING), score_of(job.run_after, id), id)
      requeue(result, priority, id, job.run_after)
    end
  end
  return result
end)
