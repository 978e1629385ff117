-- What scripts share that end attempts or remove jobs. Follows common.lua.

local function cut(text, most_chars)
  if #text <= most_chars then
    return text
  end
  local chars = 0
  for at = 1, #text do
    local byte = string.byte(text, at)
    if byte < 128 or byte > 191 then -- the first byte of a character in UTF-8
      chars = chars + 1
      if chars > most_chars then
        return string.sub(text, 1, at - 1)
      end
    end
  end
  return text
end

-- Set fields of a job, by PinLater's names, but times in ms; `unclaimed`: it is held by nobody now.
-- Whether it was there: false of a lean queue's job that a hand removed.
local function change_job(queue, id, changes, unclaimed)
  if is_lean(queue) then
    local job = lean_job(queue, id, changes.bd)
    if not job then
      return false
    end
    if changes.bd then
      local created = math.floor((job.ca or 0) * 1000 + 0.5)
      local head = string.format('%d %.0f %d;', job.al or 1, created, #job.cs)
      redis.call('HSET', jobs_key(queue), id, head .. job.cs .. changes.bd)
    end
    if unclaimed then
      redis.call('HDEL', claims_key(queue), id)
    elseif changes.ra then
      local claim = string.format('%.0f %s', changes.ra, job.cd or '')
      redis.call('HSET', claims_key(queue), id, claim)
    end
    local allowed = changes.al or job.al or 1
    local update = string.format('%d %d %.0f;', allowed, changes.ar or job.ar or allowed, changes.ua)
    redis.call('HSET', updates_key(queue), id, update .. (changes.cs or job.cs))
    return true
  end
  local key, fields = job_key(queue, id), {}
  changes.ua = seconds(changes.ua)
  for field, value in pairs(changes) do
    fields[#fields + 1] = field
    fields[#fields + 1] = value
  end
  redis.call('HSET', key, unpack(fields))
  if unclaimed then
    redis.call('HDEL', key, 'cd')
  end
  return true
end

-- It is held by nobody now, and otherwise as it was.
local function release_job(queue, id)
  if is_lean(queue) then
    redis.call('HDEL', claims_key(queue), id)
  else
    redis.call('HDEL', job_key(queue, id), 'cd')
  end
end

-- Whether it was there.
local function remove_job(queue, id)
  if not is_lean(queue) then
    return redis.call('UNLINK', job_key(queue, id)) == 1
  end
  redis.pcall('HDEL', claims_key(queue), id)
  redis.pcall('HDEL', updates_key(queue), id)
  return redis.pcall('HDEL', jobs_key(queue), id) == 1
end

-- A job that is IN_PROGRESS, or nil.
local function held_claim(queue, priority, id)
  local running = set_key(queue, priority, IN_PROGRESS)
  local score = redis.call('ZSCORE', running, id)
  if not score then
    return nil
  end
  local fields = job_fields(queue, id, 'cd', 'ar', 'ra', 'cs')
  if not fields then
    redis.call('ZREM', running, id)
    return nil
  end
  return {
    id = id,
    running = running,
    claim = fields[1] or '',
    remaining = number_in(fields[2], 0, LARGEST_I32) or 1,
    run_after = number_in(fields[3], -LATEST_ORDERED_MS, LATEST_MS) or ms_of(score),
    status = fields[4] or '',
  }
end

-- PENDING with one attempt less, or FAILED with none; true if PENDING.
local function fail_attempt(job, queue, priority, retry_ms, status, now)
  redis.call('ZREM', job.running, job.id)
  local changes = { ar = job.remaining - 1, ra = retry_ms, ua = now, cs = status }
  if job.remaining > 1 then
    change_job(queue, job.id, changes, true)
    redis.call('ZADD', set_key(queue, priority, PENDING), score_of(retry_ms, job.id), job.id)
    return true
  end
  changes.ar, changes.ra = 0, job.run_after
  change_job(queue, job.id, changes, false)
  redis.call('ZADD', set_key(queue, priority, FAILED), score_of(now, job.id), job.id)
  return false
end

local MOST_GONE_AT_ONCE = 10000

-- Give `visit` the first jobs of a set with scores from `least` to `most`, `limit` at most. It has
-- to remove what it is given. What is no job, or was evicted, is removed on the way, so many at
-- once and no more.
local function visit_first(set, queue, least, most, limit, visit)
  local visited, gone = 0, 0
  while visited < limit and gone < MOST_GONE_AT_ONCE do
    local ids = redis.call('ZRANGEBYSCORE', set, least, most, 'LIMIT', 0, limit - visited)
    if #ids == 0 then
      break
    end
    for _, id in ipairs(ids) do
      if forget_if_gone(set, queue, id) then
        gone = gone + 1
      else
        visit(id)
        visited = visited + 1
      end
    end
  end
  return visited
end
